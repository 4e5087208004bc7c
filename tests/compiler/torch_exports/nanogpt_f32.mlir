module {
  func.func @main(%arg0: tensor<32x16xf32>, %arg1: tensor<32x16xf32>, %arg2: tensor<8x16xf32>, %arg3: tensor<16xf32>, %arg4: tensor<16xf32>, %arg5: tensor<16xf32>, %arg6: tensor<16xf32>, %arg7: tensor<16x16xf32>, %arg8: tensor<16x16xf32>, %arg9: tensor<16x16xf32>, %arg10: tensor<16x16xf32>, %arg11: tensor<16xf32>, %arg12: tensor<16xf32>, %arg13: tensor<64x16xf32>, %arg14: tensor<64xf32>, %arg15: tensor<16x64xf32>, %arg16: tensor<16xf32>, %arg17: tensor<2x8xi64>, %arg18: tensor<2x8xi64>) -> tensor<f32> {
    %c = stablehlo.constant dense<0> : tensor<16xi64>
    %c_0 = stablehlo.constant dense<-100> : tensor<16xi64>
    %c_1 = stablehlo.constant dense<0> : tensor<8x8xi64>
    %c_2 = stablehlo.constant dense<0> : tensor<8xi64>
    %c_3 = stablehlo.constant dense<1> : tensor<8xi64>
    %c_4 = stablehlo.constant dense<8> : tensor<i64>
    %c_5 = stablehlo.constant dense<1> : tensor<i64>
    %c_6 = stablehlo.constant dense<0> : tensor<i64>
    %cst = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %cst_7 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %cst_8 = stablehlo.constant dense<1.000000e+00> : tensor<8x8xf32>
    %cst_9 = stablehlo.constant dense<0.000000e+00> : tensor<f64>
    %cst_10 = stablehlo.constant dense<1.000000e+00> : tensor<2x8x64xf32>
    %cst_11 = stablehlo.constant dense<2.000000e+00> : tensor<2x8x64xf32>
    %cst_12 = stablehlo.constant dense<5.000000e-01> : tensor<2x8x64xf32>
    %cst_13 = stablehlo.constant dense<-4.000000e+00> : tensor<2x8x64xf32>
    %cst_14 = stablehlo.constant dense<4.000000e+00> : tensor<2x8x64xf32>
    %cst_15 = stablehlo.constant dense<-2.72614237E-10> : tensor<2x8x64xf32>
    %cst_16 = stablehlo.constant dense<2.77068146E-8> : tensor<2x8x64xf32>
    %cst_17 = stablehlo.constant dense<-2.10102394E-6> : tensor<2x8x64xf32>
    %cst_18 = stablehlo.constant dense<-5.69250624E-5> : tensor<2x8x64xf32>
    %cst_19 = stablehlo.constant dense<-7.34990637E-4> : tensor<2x8x64xf32>
    %cst_20 = stablehlo.constant dense<-2.954600e-03> : tensor<2x8x64xf32>
    %cst_21 = stablehlo.constant dense<-0.0160960332> : tensor<2x8x64xf32>
    %cst_22 = stablehlo.constant dense<-1.45660715E-5> : tensor<2x8x64xf32>
    %cst_23 = stablehlo.constant dense<-2.13374049E-4> : tensor<2x8x64xf32>
    %cst_24 = stablehlo.constant dense<-0.00168282702> : tensor<2x8x64xf32>
    %cst_25 = stablehlo.constant dense<-0.00737332925> : tensor<2x8x64xf32>
    %cst_26 = stablehlo.constant dense<-0.0142647391> : tensor<2x8x64xf32>
    %cst_27 = stablehlo.constant dense<-1.000000e+00> : tensor<2x8x64xf32>
    %cst_28 = arith.constant dense<1> : tensor<1xi64>
    %cst_29 = arith.constant dense<16> : tensor<1xi64>
    %cst_30 = arith.constant dense<1.000000e-05> : tensor<1xf64>
    %cst_31 = arith.constant dense<2.8284271247461903> : tensor<1xf64>
    %0 = "stablehlo.gather"(%arg0, %arg17) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, indices_are_sorted = false, slice_sizes = array<i64: 1, 16>}> : (tensor<32x16xf32>, tensor<2x8xi64>) -> tensor<2x8x16xf32>
    %1 = stablehlo.convert %0 : tensor<2x8x16xf32>
    %2 = stablehlo.convert %c_5 : (tensor<i64>) -> tensor<f64>
    %3 = stablehlo.convert %c_4 : (tensor<i64>) -> tensor<f64>
    %4 = stablehlo.divide %3, %2 : tensor<f64>
    %5 = stablehlo.ceil %4 : tensor<f64>
    %6 = stablehlo.convert %5 : (tensor<f64>) -> tensor<i64>
    %7 = stablehlo.reshape %6 : (tensor<i64>) -> tensor<1xi64>
    %8 = stablehlo.dynamic_iota %7, dim = 0 : (tensor<1xi64>) -> tensor<8xi64>
    %9 = stablehlo.multiply %8, %c_3 : tensor<8xi64>
    %10 = stablehlo.add %9, %c_2 : tensor<8xi64>
    %11 = "stablehlo.gather"(%arg2, %10) <{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, indices_are_sorted = false, slice_sizes = array<i64: 1, 16>}> : (tensor<8x16xf32>, tensor<8xi64>) -> tensor<8x16xf32>
    %12 = stablehlo.convert %11 : tensor<8x16xf32>
    %13 = stablehlo.broadcast_in_dim %12, dims = [1, 2] : (tensor<8x16xf32>) -> tensor<2x8x16xf32>
    %14 = stablehlo.add %1, %13 : tensor<2x8x16xf32>
    %15 = stablehlo.convert %14 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %16 = stablehlo.reduce(%15 init: %cst_9) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %17 = stablehlo.reshape %16 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %18 = stablehlo.convert %cst_29 : (tensor<1xi64>) -> tensor<1xf64>
    %19 = stablehlo.reshape %18 : (tensor<1xf64>) -> tensor<f64>
    %20 = stablehlo.broadcast_in_dim %19, dims = [] : (tensor<f64>) -> tensor<2x8x1xf64>
    %21 = stablehlo.divide %17, %20 : tensor<2x8x1xf64>
    %22 = stablehlo.broadcast_in_dim %21, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %23 = stablehlo.subtract %15, %22 : tensor<2x8x16xf64>
    %24 = stablehlo.multiply %23, %23 : tensor<2x8x16xf64>
    %25 = stablehlo.reduce(%24 init: %cst_9) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %26 = stablehlo.reshape %25 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %27 = stablehlo.divide %26, %20 : tensor<2x8x1xf64>
    %28 = stablehlo.convert %27 : (tensor<2x8x1xf64>) -> tensor<2x8x1xf32>
    %29 = stablehlo.reduce(%14 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf32>, tensor<f32>) -> tensor<2x8xf32>
    %30 = stablehlo.reshape %29 : (tensor<2x8xf32>) -> tensor<2x8x1xf32>
    %31 = stablehlo.convert %cst_29 : (tensor<1xi64>) -> tensor<1xf32>
    %32 = stablehlo.reshape %31 : (tensor<1xf32>) -> tensor<f32>
    %33 = stablehlo.broadcast_in_dim %32, dims = [] : (tensor<f32>) -> tensor<2x8x1xf32>
    %34 = stablehlo.divide %30, %33 : tensor<2x8x1xf32>
    %35 = stablehlo.convert %cst_30 : (tensor<1xf64>) -> tensor<1xf32>
    %36 = stablehlo.reshape %35 : (tensor<1xf32>) -> tensor<f32>
    %37 = stablehlo.broadcast_in_dim %36, dims = [] : (tensor<f32>) -> tensor<2x8x1xf32>
    %38 = stablehlo.add %28, %37 : tensor<2x8x1xf32>
    %39 = stablehlo.rsqrt %38 : tensor<2x8x1xf32>
    %40 = stablehlo.broadcast_in_dim %34, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %41 = stablehlo.subtract %14, %40 : tensor<2x8x16xf32>
    %42 = stablehlo.broadcast_in_dim %39, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %43 = stablehlo.multiply %41, %42 : tensor<2x8x16xf32>
    %44 = stablehlo.broadcast_in_dim %arg5, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %45 = stablehlo.multiply %43, %44 : tensor<2x8x16xf32>
    %46 = stablehlo.broadcast_in_dim %arg6, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %47 = stablehlo.add %45, %46 : tensor<2x8x16xf32>
    %48 = stablehlo.transpose %arg7, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %49 = stablehlo.reshape %47 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %50 = stablehlo.dot_general %49, %48, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %51 = stablehlo.reshape %50 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %52 = stablehlo.reshape %51 : (tensor<2x8x16xf32>) -> tensor<2x8x2x8xf32>
    %53 = stablehlo.transpose %arg8, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %54 = stablehlo.dot_general %49, %53, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %55 = stablehlo.reshape %54 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %56 = stablehlo.reshape %55 : (tensor<2x8x16xf32>) -> tensor<2x8x2x8xf32>
    %57 = stablehlo.transpose %arg9, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %58 = stablehlo.dot_general %49, %57, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %59 = stablehlo.reshape %58 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %60 = stablehlo.reshape %59 : (tensor<2x8x16xf32>) -> tensor<2x8x2x8xf32>
    %61 = stablehlo.transpose %52, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xf32>) -> tensor<2x2x8x8xf32>
    %62 = stablehlo.transpose %56, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xf32>) -> tensor<2x2x8x8xf32>
    %63 = stablehlo.transpose %60, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xf32>) -> tensor<2x2x8x8xf32>
    %64 = stablehlo.transpose %62, dims = [0, 1, 3, 2] : (tensor<2x2x8x8xf32>) -> tensor<2x2x8x8xf32>
    %65 = stablehlo.reshape %61 : (tensor<2x2x8x8xf32>) -> tensor<4x8x8xf32>
    %66 = stablehlo.reshape %64 : (tensor<2x2x8x8xf32>) -> tensor<4x8x8xf32>
    %67 = stablehlo.broadcast_in_dim %66, dims = [0, 1, 2] : (tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
    %68 = stablehlo.dot_general %65, %67, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<4x8x8xf32>, tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
    %69 = stablehlo.reshape %68 : (tensor<4x8x8xf32>) -> tensor<2x2x8x8xf32>
    %70 = stablehlo.convert %cst_31 : (tensor<1xf64>) -> tensor<1xf32>
    %71 = stablehlo.reshape %70 : (tensor<1xf32>) -> tensor<f32>
    %72 = stablehlo.broadcast_in_dim %71, dims = [] : (tensor<f32>) -> tensor<2x2x8x8xf32>
    %73 = stablehlo.divide %69, %72 : tensor<2x2x8x8xf32>
    %74 = stablehlo.reshape %10 : (tensor<8xi64>) -> tensor<1x8xi64>
    %75 = stablehlo.reshape %10 : (tensor<8xi64>) -> tensor<8x1xi64>
    %76 = stablehlo.broadcast_in_dim %74, dims = [0, 1] : (tensor<1x8xi64>) -> tensor<8x8xi64>
    %77 = stablehlo.broadcast_in_dim %75, dims = [0, 1] : (tensor<8x1xi64>) -> tensor<8x8xi64>
    %78 = stablehlo.subtract %76, %77 : tensor<8x8xi64>
    %79 = stablehlo.compare LE, %78, %c_1, SIGNED : (tensor<8x8xi64>, tensor<8x8xi64>) -> tensor<8x8xi1>
    %80 = stablehlo.broadcast_in_dim %79, dims = [0, 1] : (tensor<8x8xi1>) -> tensor<8x8xi1>
    %81 = stablehlo.broadcast_in_dim %cst_8, dims = [0, 1] : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %82 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %83 = stablehlo.select %80, %81, %82 : tensor<8x8xi1>, tensor<8x8xf32>
    %84 = stablehlo.convert %c_6 : (tensor<i64>) -> tensor<f32>
    %85 = stablehlo.broadcast_in_dim %84, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %86 = stablehlo.compare EQ, %83, %85, FLOAT : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xi1>
    %87 = stablehlo.reshape %86 : (tensor<8x8xi1>) -> tensor<1x1x8x8xi1>
    %88 = stablehlo.broadcast_in_dim %87, dims = [0, 1, 2, 3] : (tensor<1x1x8x8xi1>) -> tensor<2x2x8x8xi1>
    %89 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<2x2x8x8xf32>
    %90 = stablehlo.broadcast_in_dim %73, dims = [0, 1, 2, 3] : (tensor<2x2x8x8xf32>) -> tensor<2x2x8x8xf32>
    %91 = stablehlo.select %88, %89, %90 : tensor<2x2x8x8xi1>, tensor<2x2x8x8xf32>
    %92 = stablehlo.reduce(%91 init: %cst) applies stablehlo.maximum across dimensions = [3] : (tensor<2x2x8x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %93 = stablehlo.reshape %92 : (tensor<2x2x8xf32>) -> tensor<2x2x8x1xf32>
    %94 = stablehlo.broadcast_in_dim %93, dims = [0, 1, 2, 3] : (tensor<2x2x8x1xf32>) -> tensor<2x2x8x8xf32>
    %95 = stablehlo.subtract %91, %94 : tensor<2x2x8x8xf32>
    %96 = stablehlo.exponential %95 : tensor<2x2x8x8xf32>
    %97 = stablehlo.reduce(%96 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<2x2x8x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %98 = stablehlo.reshape %97 : (tensor<2x2x8xf32>) -> tensor<2x2x8x1xf32>
    %99 = stablehlo.broadcast_in_dim %98, dims = [0, 1, 2, 3] : (tensor<2x2x8x1xf32>) -> tensor<2x2x8x8xf32>
    %100 = stablehlo.divide %96, %99 : tensor<2x2x8x8xf32>
    %101 = stablehlo.reshape %100 : (tensor<2x2x8x8xf32>) -> tensor<4x8x8xf32>
    %102 = stablehlo.reshape %63 : (tensor<2x2x8x8xf32>) -> tensor<4x8x8xf32>
    %103 = stablehlo.broadcast_in_dim %102, dims = [0, 1, 2] : (tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
    %104 = stablehlo.dot_general %101, %103, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<4x8x8xf32>, tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
    %105 = stablehlo.reshape %104 : (tensor<4x8x8xf32>) -> tensor<2x2x8x8xf32>
    %106 = stablehlo.transpose %105, dims = [0, 2, 1, 3] : (tensor<2x2x8x8xf32>) -> tensor<2x8x2x8xf32>
    %107 = stablehlo.reshape %106 : (tensor<2x8x2x8xf32>) -> tensor<2x8x16xf32>
    %108 = stablehlo.transpose %arg10, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %109 = stablehlo.reshape %107 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %110 = stablehlo.dot_general %109, %108, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %111 = stablehlo.reshape %110 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %112 = stablehlo.add %14, %111 : tensor<2x8x16xf32>
    %113 = stablehlo.convert %112 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %114 = stablehlo.reduce(%113 init: %cst_9) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %115 = stablehlo.reshape %114 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %116 = stablehlo.divide %115, %20 : tensor<2x8x1xf64>
    %117 = stablehlo.broadcast_in_dim %116, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %118 = stablehlo.subtract %113, %117 : tensor<2x8x16xf64>
    %119 = stablehlo.multiply %118, %118 : tensor<2x8x16xf64>
    %120 = stablehlo.reduce(%119 init: %cst_9) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %121 = stablehlo.reshape %120 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %122 = stablehlo.divide %121, %20 : tensor<2x8x1xf64>
    %123 = stablehlo.convert %122 : (tensor<2x8x1xf64>) -> tensor<2x8x1xf32>
    %124 = stablehlo.reduce(%112 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf32>, tensor<f32>) -> tensor<2x8xf32>
    %125 = stablehlo.reshape %124 : (tensor<2x8xf32>) -> tensor<2x8x1xf32>
    %126 = stablehlo.divide %125, %33 : tensor<2x8x1xf32>
    %127 = stablehlo.add %123, %37 : tensor<2x8x1xf32>
    %128 = stablehlo.rsqrt %127 : tensor<2x8x1xf32>
    %129 = stablehlo.broadcast_in_dim %126, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %130 = stablehlo.subtract %112, %129 : tensor<2x8x16xf32>
    %131 = stablehlo.broadcast_in_dim %128, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %132 = stablehlo.multiply %130, %131 : tensor<2x8x16xf32>
    %133 = stablehlo.broadcast_in_dim %arg11, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %134 = stablehlo.multiply %132, %133 : tensor<2x8x16xf32>
    %135 = stablehlo.broadcast_in_dim %arg12, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %136 = stablehlo.add %134, %135 : tensor<2x8x16xf32>
    %137 = stablehlo.reshape %136 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %138 = stablehlo.transpose %arg13, dims = [1, 0] : (tensor<64x16xf32>) -> tensor<16x64xf32>
    %139 = stablehlo.dot_general %137, %138, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x64xf32>) -> tensor<16x64xf32>
    %140 = stablehlo.convert %cst_28 : (tensor<1xi64>) -> tensor<1xf32>
    %141 = stablehlo.reshape %140 : (tensor<1xf32>) -> tensor<f32>
    %142 = stablehlo.broadcast_in_dim %141, dims = [] : (tensor<f32>) -> tensor<16x64xf32>
    %143 = stablehlo.multiply %139, %142 : tensor<16x64xf32>
    %144 = stablehlo.broadcast_in_dim %141, dims = [] : (tensor<f32>) -> tensor<64xf32>
    %145 = stablehlo.multiply %arg14, %144 : tensor<64xf32>
    %146 = stablehlo.broadcast_in_dim %145, dims = [1] : (tensor<64xf32>) -> tensor<16x64xf32>
    %147 = stablehlo.add %143, %146 : tensor<16x64xf32>
    %148 = stablehlo.reshape %147 : (tensor<16x64xf32>) -> tensor<2x8x64xf32>
    %149 = stablehlo.multiply %148, %cst_12 : tensor<2x8x64xf32>
    %150 = stablehlo.rsqrt %cst_11 : tensor<2x8x64xf32>
    %151 = stablehlo.multiply %148, %150 : tensor<2x8x64xf32>
    %152 = stablehlo.clamp %cst_13, %151, %cst_14 : tensor<2x8x64xf32>
    %153 = stablehlo.multiply %152, %152 : tensor<2x8x64xf32>
    %154 = stablehlo.multiply %cst_15, %153 : tensor<2x8x64xf32>
    %155 = stablehlo.add %154, %cst_16 : tensor<2x8x64xf32>
    %156 = stablehlo.multiply %155, %153 : tensor<2x8x64xf32>
    %157 = stablehlo.add %156, %cst_17 : tensor<2x8x64xf32>
    %158 = stablehlo.multiply %157, %153 : tensor<2x8x64xf32>
    %159 = stablehlo.add %158, %cst_18 : tensor<2x8x64xf32>
    %160 = stablehlo.multiply %159, %153 : tensor<2x8x64xf32>
    %161 = stablehlo.add %160, %cst_19 : tensor<2x8x64xf32>
    %162 = stablehlo.multiply %161, %153 : tensor<2x8x64xf32>
    %163 = stablehlo.add %162, %cst_20 : tensor<2x8x64xf32>
    %164 = stablehlo.multiply %163, %153 : tensor<2x8x64xf32>
    %165 = stablehlo.add %164, %cst_21 : tensor<2x8x64xf32>
    %166 = stablehlo.multiply %cst_22, %153 : tensor<2x8x64xf32>
    %167 = stablehlo.add %166, %cst_23 : tensor<2x8x64xf32>
    %168 = stablehlo.multiply %167, %153 : tensor<2x8x64xf32>
    %169 = stablehlo.add %168, %cst_24 : tensor<2x8x64xf32>
    %170 = stablehlo.multiply %169, %153 : tensor<2x8x64xf32>
    %171 = stablehlo.add %170, %cst_25 : tensor<2x8x64xf32>
    %172 = stablehlo.multiply %171, %153 : tensor<2x8x64xf32>
    %173 = stablehlo.add %172, %cst_26 : tensor<2x8x64xf32>
    %174 = stablehlo.multiply %152, %165 : tensor<2x8x64xf32>
    %175 = stablehlo.divide %174, %173 : tensor<2x8x64xf32>
    %176 = stablehlo.clamp %cst_27, %175, %cst_10 : tensor<2x8x64xf32>
    %177 = stablehlo.add %176, %cst_10 : tensor<2x8x64xf32>
    %178 = stablehlo.multiply %177, %149 : tensor<2x8x64xf32>
    %179 = stablehlo.reshape %178 : (tensor<2x8x64xf32>) -> tensor<16x64xf32>
    %180 = stablehlo.transpose %arg15, dims = [1, 0] : (tensor<16x64xf32>) -> tensor<64x16xf32>
    %181 = stablehlo.dot_general %179, %180, contracting_dims = [1] x [0] : (tensor<16x64xf32>, tensor<64x16xf32>) -> tensor<16x16xf32>
    %182 = stablehlo.broadcast_in_dim %141, dims = [] : (tensor<f32>) -> tensor<16x16xf32>
    %183 = stablehlo.multiply %181, %182 : tensor<16x16xf32>
    %184 = stablehlo.broadcast_in_dim %141, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %185 = stablehlo.multiply %arg16, %184 : tensor<16xf32>
    %186 = stablehlo.broadcast_in_dim %185, dims = [1] : (tensor<16xf32>) -> tensor<16x16xf32>
    %187 = stablehlo.add %183, %186 : tensor<16x16xf32>
    %188 = stablehlo.reshape %187 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %189 = stablehlo.add %112, %188 : tensor<2x8x16xf32>
    %190 = stablehlo.convert %189 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %191 = stablehlo.reduce(%190 init: %cst_9) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %192 = stablehlo.reshape %191 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %193 = stablehlo.divide %192, %20 : tensor<2x8x1xf64>
    %194 = stablehlo.broadcast_in_dim %193, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %195 = stablehlo.subtract %190, %194 : tensor<2x8x16xf64>
    %196 = stablehlo.multiply %195, %195 : tensor<2x8x16xf64>
    %197 = stablehlo.reduce(%196 init: %cst_9) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %198 = stablehlo.reshape %197 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %199 = stablehlo.divide %198, %20 : tensor<2x8x1xf64>
    %200 = stablehlo.convert %199 : (tensor<2x8x1xf64>) -> tensor<2x8x1xf32>
    %201 = stablehlo.reduce(%189 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf32>, tensor<f32>) -> tensor<2x8xf32>
    %202 = stablehlo.reshape %201 : (tensor<2x8xf32>) -> tensor<2x8x1xf32>
    %203 = stablehlo.divide %202, %33 : tensor<2x8x1xf32>
    %204 = stablehlo.add %200, %37 : tensor<2x8x1xf32>
    %205 = stablehlo.rsqrt %204 : tensor<2x8x1xf32>
    %206 = stablehlo.broadcast_in_dim %203, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %207 = stablehlo.subtract %189, %206 : tensor<2x8x16xf32>
    %208 = stablehlo.broadcast_in_dim %205, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %209 = stablehlo.multiply %207, %208 : tensor<2x8x16xf32>
    %210 = stablehlo.broadcast_in_dim %arg3, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %211 = stablehlo.multiply %209, %210 : tensor<2x8x16xf32>
    %212 = stablehlo.broadcast_in_dim %arg4, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %213 = stablehlo.add %211, %212 : tensor<2x8x16xf32>
    %214 = stablehlo.transpose %arg1, dims = [1, 0] : (tensor<32x16xf32>) -> tensor<16x32xf32>
    %215 = stablehlo.reshape %213 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %216 = stablehlo.dot_general %215, %214, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x32xf32>) -> tensor<16x32xf32>
    %217 = stablehlo.reshape %216 : (tensor<16x32xf32>) -> tensor<2x8x32xf32>
    %218 = stablehlo.reshape %217 : (tensor<2x8x32xf32>) -> tensor<16x32xf32>
    %219 = stablehlo.reshape %arg18 : (tensor<2x8xi64>) -> tensor<16xi64>
    %220 = stablehlo.reduce(%218 init: %cst) applies stablehlo.maximum across dimensions = [1] : (tensor<16x32xf32>, tensor<f32>) -> tensor<16xf32>
    %221 = stablehlo.reshape %220 : (tensor<16xf32>) -> tensor<16x1xf32>
    %222 = stablehlo.broadcast_in_dim %221, dims = [0, 1] : (tensor<16x1xf32>) -> tensor<16x32xf32>
    %223 = stablehlo.subtract %218, %222 : tensor<16x32xf32>
    %224 = stablehlo.exponential %223 : tensor<16x32xf32>
    %225 = stablehlo.reduce(%224 init: %cst_7) applies stablehlo.add across dimensions = [1] : (tensor<16x32xf32>, tensor<f32>) -> tensor<16xf32>
    %226 = stablehlo.reshape %225 : (tensor<16xf32>) -> tensor<16x1xf32>
    %227 = stablehlo.log %226 : tensor<16x1xf32>
    %228 = stablehlo.broadcast_in_dim %227, dims = [0, 1] : (tensor<16x1xf32>) -> tensor<16x32xf32>
    %229 = stablehlo.subtract %223, %228 : tensor<16x32xf32>
    %230 = stablehlo.compare NE, %219, %c_0, SIGNED : (tensor<16xi64>, tensor<16xi64>) -> tensor<16xi1>
    %231 = stablehlo.broadcast_in_dim %230, dims = [0] : (tensor<16xi1>) -> tensor<16xi1>
    %232 = stablehlo.broadcast_in_dim %219, dims = [0] : (tensor<16xi64>) -> tensor<16xi64>
    %233 = stablehlo.select %231, %232, %c : tensor<16xi1>, tensor<16xi64>
    %234 = stablehlo.reshape %233 : (tensor<16xi64>) -> tensor<16x1xi64>
    %235 = stablehlo.iota dim = 0 : tensor<16x1x1xi64>
    %236 = stablehlo.reshape %234 : (tensor<16x1xi64>) -> tensor<16x1x1xi64>
    %237 = stablehlo.concatenate %235, %236, dim = 2 : (tensor<16x1x1xi64>, tensor<16x1x1xi64>) -> tensor<16x1x2xi64>
    %238 = "stablehlo.gather"(%229, %237) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1], start_index_map = [0, 1], index_vector_dim = 2>, slice_sizes = array<i64: 1, 1>}> : (tensor<16x32xf32>, tensor<16x1x2xi64>) -> tensor<16x1xf32>
    %239 = stablehlo.reshape %238 : (tensor<16x1xf32>) -> tensor<16xf32>
    %240 = stablehlo.negate %239 : tensor<16xf32>
    %241 = stablehlo.broadcast_in_dim %240, dims = [0] : (tensor<16xf32>) -> tensor<16xf32>
    %242 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %243 = stablehlo.select %231, %241, %242 : tensor<16xi1>, tensor<16xf32>
    %244 = stablehlo.convert %230 : (tensor<16xi1>) -> tensor<16xi64>
    %245 = stablehlo.reduce(%244 init: %c_6) applies stablehlo.add across dimensions = [0] : (tensor<16xi64>, tensor<i64>) -> tensor<i64>
    %246 = stablehlo.convert %245 : (tensor<i64>) -> tensor<f32>
    %247 = stablehlo.reduce(%243 init: %cst_7) applies stablehlo.add across dimensions = [0] : (tensor<16xf32>, tensor<f32>) -> tensor<f32>
    %248 = stablehlo.divide %247, %246 : tensor<f32>
    return %248 : tensor<f32>
  }
}

